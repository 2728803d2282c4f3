#!/usr/bin/env python3
"""The milliseconds that NCCL takes between two processes of this machine, as JSON: for an all-reduce of BF16 values,
and for the sends and receives by which a step exchanges the same values as gradients and as weights.

    tests/python/nccl_rates.py BYTES        with NCCL_MULTI_RANK_GPU_ENABLE=1 on a single GPU
"""

import ctypes
import json
import multiprocessing
import statistics
import sys
import time

WARM_UP, ROUNDS = 3, 20
INT8, BF16, SUM = 0, 9, 0
cuda, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")


class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]


def check(status):
    if status != 0:
        raise RuntimeError(f"a call of CUDA or NCCL failed with {status}")


def measure(rank, pipe, size):
    count, context, stream, communicator, ident = ctypes.c_int(), *(ctypes.c_void_p() for _ in range(3)), Id()
    check(cuda.cuInit(0))
    check(cuda.cuDeviceGetCount(ctypes.byref(count)))
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), rank % count.value))
    check(cuda.cuCtxSetCurrent(context))
    check(cuda.cuStreamCreate(ctypes.byref(stream), 1))
    values, received = ctypes.c_void_p(), ctypes.c_void_p()
    for buffer in (values, received):
        check(cuda.cuMemAllocAsync(ctypes.byref(buffer), ctypes.c_size_t(size), stream))
    if rank == 0:
        check(nccl.ncclGetUniqueId(ctypes.byref(ident)))
        pipe.send(bytes(ident))
    else:
        ident = Id.from_buffer_copy(pipe.recv())
    check(nccl.ncclCommInitRank(ctypes.byref(communicator), 2, ident, rank))

    def all_reduce():
        check(nccl.ncclAllReduce(values, values, ctypes.c_size_t(size // 2), BF16, SUM, communicator, stream))

    def exchange():
        # Each process sends half of the gradients, and its half of the weights.
        for _ in range(2):
            check(nccl.ncclGroupStart())
            check(nccl.ncclSend(values, ctypes.c_size_t(size // 2), INT8, 1 - rank, communicator, stream))
            check(nccl.ncclRecv(received, ctypes.c_size_t(size // 2), INT8, 1 - rank, communicator, stream))
            check(nccl.ncclGroupEnd())

    times = {}
    for work in (all_reduce, exchange):
        rounds = []
        for _ in range(WARM_UP + ROUNDS):
            began = time.perf_counter()
            work()
            check(cuda.cuStreamSynchronize(stream))
            rounds.append(1e3 * (time.perf_counter() - began))
        times[work.__name__] = statistics.median(rounds[WARM_UP:])
    if rank == 0:
        print(json.dumps(times))


if __name__ == "__main__":
    processes = multiprocessing.get_context("spawn")
    ends = processes.Pipe()
    ranks = [processes.Process(target=measure, args=(rank, ends[rank], int(sys.argv[1]))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))
