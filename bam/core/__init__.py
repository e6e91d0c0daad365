"""The maths, and every line that privatises a gradient.

Oracles, clips, exact sums of integers, noise, random words, batches. It imports JAX, optax, NumPy,
SciPy and jaxtyping, and of `bam` `InputError` alone; all other folders may import it.
"""
