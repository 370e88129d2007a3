"""C++ kernels for CPUs, built at set-up and loaded here. Without them, torch is used.

    src/*.cpp ──build.py──▶ libheadrace.so ──library.py──▶ NativeLibrary ──▶ attention

The library has a plain C interface that takes pointers, and depends on neither Python nor torch. So
g++ builds it in seconds, and it works with every version of torch. It runs its loops on torch's own
OpenMP threads.

Two modules also serve other devices: `device_copy` copies a step's numbers to the device, and
`torch_library` registers functions as torch operations.
"""
