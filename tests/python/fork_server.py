"""Runs scripts for tests in forks of one process, because importing PyTorch and transformers takes seconds.

    python fork_server.py

Prints the path of a Unix socket. Each connection sends one line, the JSON list of a script and its arguments, and
receives the script's output. Ends when its standard input does.
"""

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback

with contextlib.suppress(ImportError):
    # Any model brings what all of them need.
    from transformers import AutoTokenizer, LlamaForCausalLM  # noqa: F401


def run(connection):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.argv = json.loads(connection.makefile().readline())
    os.dup2(connection.fileno(), sys.stdout.fileno())
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    sys.stdout.flush()
    os._exit(0)


# Nobody waits for the forks.
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
    server.bind(f"{folder}/socket")
    server.listen()
    print(f"{folder}/socket", flush=True)
    while sys.stdin not in select.select([server, sys.stdin], [], [])[0]:
        connection, _ = server.accept()
        if os.fork() == 0:
            run(connection)
        connection.close()
