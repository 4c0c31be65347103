"""Native kernels for the CPU: C++ over the C API of Python, for AVX-512, AVX2 and any other processor."""
