"""The device kernels: ``fastmlm.kernels.gpu`` (Triton); sources stand in ``kernels/`` at the top of the repository."""
