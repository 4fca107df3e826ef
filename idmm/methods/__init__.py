"""Training methods, one file each; the contract is in ``base``."""
