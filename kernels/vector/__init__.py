"""The vector language in which kernels are written: Numba types and intrinsics that emit LLVM IR."""
