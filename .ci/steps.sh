# Steps that `.ci/run` and `.ci/full` share, with a table of their times. To be sourced.
# shellcheck shell=bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Line tables cost about a sixth of the compile time, and the text of a panic names its line without them.
export CARGO_PROFILE_DEV_DEBUG=0
# Fewer units repeat fewer generic and inlined functions.
export CARGO_PROFILE_DEV_CODEGEN_UNITS=4
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0 RUSTFLAGS="-D warnings" FINETUNE_PYTHON=$PWD/target/ci/venv/bin/python
# A test fails instead of skipping if one of these is missing. This project's own CI has `../shared`, and sets CI=true.
export FINETUNE_REQUIRE=python,tmux
[[ ${CI:-} != true ]] || FINETUNE_REQUIRE+=,shared
mkdir -p target/ci

# Sets `cpu` to the seconds of processor time that finished children have used. A subshell would count only its own.
count_cpu() {
  times > target/ci/times
  cpu=$(awk -F'[ms ]+' 'NR == 2 { printf "%d", $1 * 60 + $2 + $3 * 60 + $4 }' target/ci/times)
}

steps=() current=
step() { # step NAME COMMAND...
  count_cpu
  current=$1 began=$SECONDS cpu_before=$cpu
  printf '\n=== %s, at %d:%02d\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
  "${@:2}"
  finish_step
}

finish_step() {
  local seconds=$((SECONDS - began))
  count_cpu
  steps+=("$(printf '%3d:%02d %8d s  %s' $((seconds / 60)) $((seconds % 60)) $((cpu - cpu_before)) "$current")")
  current=
}

# Prints the table of steps; the last one is the step that failed, if one did.
print_times() {
  local status=$?
  [[ -z $current ]] || { current+=' (failed)'; finish_step; }
  printf '\n  wall  processor  step, on %s × %s\n' "$(nproc)" "$(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1)"
  printf '%s\n' "${steps[@]}"
  printf '%3d:%02d             total\n' $((SECONDS / 60)) $((SECONDS % 60))
  return $status
}
trap print_times EXIT

# Runs `cargo test` with filters, and fails if no test runs or one of the filters with `::` matches none.
filtered_test() {
  local log filter
  log=$(mktemp target/ci/filtered.XXXXXX)
  cargo test "$@" 2>&1 | tee "$log"
  grep -qE '^test result: ok\. [1-9]' "$log" || { echo "no test matches: cargo test $*"; return 1; }
  for filter in "$@"; do
    [[ $filter != *::* ]] || grep -qE "^test .*$filter" "$log" || { echo "no test matches: $filter"; return 1; }
  done
  rm "$log"
}

# Runs each argument, a command, at the same time as the others.
together() {
  local command job jobs=() failed=0
  for command in "$@"; do
    $command &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
  return $failed
}

system_packages() {
  local missing=()
  command -v tmux > /dev/null || missing+=(tmux)
  python3 -c 'import venv, ensurepip' 2> /dev/null || missing+=(python3-venv)
  command -v objdump > /dev/null || missing+=(binutils)
  command -v strace > /dev/null || missing+=(strace)
  command -v c++ > /dev/null || missing+=(g++)
  command -v mpicc > /dev/null || missing+=(libopenmpi-dev)
  command -v mpirun > /dev/null || missing+=(openmpi-bin)
  # Not libclang-cpp, which other packages bring.
  grep -qE 'libclang(-[0-9.]+)?\.so' <(ldconfig -p; ls /usr/lib/llvm-*/lib 2> /dev/null) || missing+=(libclang-dev)
  [[ ${#missing[@]} -eq 0 ]] && return
  apt-get update -q
  DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${missing[@]}"
}

# Downloads Python's packages and the CUDA toolkit while the compiler works; `downloaded` waits for them.
downloads() {
  .ci/python-env target/ci/venv && PYTHON="$FINETUNE_PYTHON" .ci/cuda-toolkit target/ci/cuda
}

start_downloads() {
  downloads > target/ci/downloads.log 2>&1 &
  downloading=$!
}

downloaded() {
  wait "$downloading" || { cat target/ci/downloads.log; return 1; }
}
