"""The toolchain: kernels to object files, and object files into this process."""
