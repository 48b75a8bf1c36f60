"""Deep blocks: activations become polynomials, and several blocks become one."""
