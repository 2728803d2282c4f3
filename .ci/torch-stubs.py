#!/usr/bin/env python3
"""Lets PyTorch's ordinary Linux wheel be imported on a CPU without the gigabytes of NVIDIA libraries it is linked with.

    python torch-stubs.py SITE_PACKAGES        # where `torch` was installed with `pip install --no-deps torch`

For every missing library that torch's libraries need, it writes a small one with the same name into `torch/lib`, where
torch looks first. It exports the required symbols in the required versions. A function returns 100,
`cudaErrorNoDevice`, so that torch finds no GPU and uses the CPU. Needs binutils and a C compiler.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100
# Prefixes of the symbols that NVIDIA's libraries export without a version.
UNVERSIONED = re.compile(r"(cu|nv|nccl|__cuda)\w*$")


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def requirements(library):
    """The libraries that `library` needs, the versions it asks of each, and its undefined symbols by version."""
    needed, versions, source = set(), defaultdict(set), None
    for line in run("objdump", "-p", library).splitlines():
        if match := re.match(r"\s+NEEDED\s+(\S+)", line):
            needed.add(match[1])
        elif match := re.match(r"\s+required from (\S+):", line):
            source = match[1]
        elif source and (match := re.match(r"\s+0x\w+ 0x\w+ \d+ (\S+)", line)):
            versions[source].add(match[1])
    symbols = defaultdict(set)
    for line in run("nm", "-D", "--undefined-only", library).splitlines():
        name, _, version = line.split()[-1].partition("@")
        symbols[version.lstrip("@")].add(name)
    return needed, versions, symbols


def body(symbol):
    if re.search(r"(GetErrorString|GetErrorName)$", symbol):
        return f'const char *{symbol}(void) {{ return "no NVIDIA library: this is a stub"; }}\n'
    return f"int {symbol}(void) {{ return {NO_DEVICE}; }}\n"


def write_stub(path, symbols_by_version):
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch, "stub.c"), Path(scratch, "stub.map")
        source.write_text("".join(body(name) for names in symbols_by_version.values() for name in sorted(names)))
        script.write_text("".join(f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))} }};\n"
                                  for version, names in symbols_by_version.items() if version))
        versioned = [f"-Wl,--version-script={script}"] if script.stat().st_size else []
        run("cc", "-w", "-shared", "-fPIC", "-fno-builtin", "-o", path, source, f"-Wl,-soname,{path.name}", *versioned)


def main(site_packages):
    lib = Path(site_packages, "torch", "lib")
    ours = [*lib.glob("*.so*"), *lib.parent.glob("_C*.so")]
    if not ours:
        sys.exit(f"torch-stubs.py: no torch under `{site_packages}`")
    needed, versions, symbols = set(), defaultdict(set), defaultdict(set)
    for library in ours:
        library_needed, library_versions, library_symbols = requirements(library)
        needed |= library_needed
        for source, names in library_versions.items():
            versions[source] |= names
        for version, names in library_symbols.items():
            symbols[version] |= names
    present = {path.name for path in ours} | set(re.findall(r"^\s+(\S+) \(", run("/sbin/ldconfig", "-p"), re.MULTILINE))
    missing = sorted(needed - present)
    # Symbols without a version may come from any library; the first one carries them all.
    free = {name for name in symbols[""] if UNVERSIONED.match(name)}
    for name in missing:
        exports = {version: symbols[version] for version in sorted(versions[name])}
        if free:
            exports, free = exports | {"": free}, set()
        write_stub(lib / name, exports)
    print(f"torch-stubs.py: {len(missing)} stand-ins for {', '.join(missing) or 'nothing'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
