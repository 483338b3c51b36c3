"""How good a policy is: what tries at tasks say of it, and of two of them side by side."""
