"""The relative bias of `hstu_attention`: its definition, its kernels, and the gradients of its tables."""
