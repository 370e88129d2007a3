"""Kernels for CPUs, in C++: built at set-up, loaded here, replaced by torch where they are not.

    src/*.cpp ──build.py──▶ libheadrace.so ──library.py──▶ NativeLibrary ──▶ attention

The library has a plain C interface and knows neither Python nor torch: it is handed pointers. So it
is built in seconds by any C++ compiler, for all versions of torch at once. It runs its loops on
torch's own OpenMP threads.
"""
