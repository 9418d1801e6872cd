"""Seeds that depend only on what they are for, never on how many were drawn before."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 31-bit seed from its purpose, e.g. ``derive_seed(42, "rollout", step, prompt_id, sample)``.

    The same parts give the same seed on every rank, replica and resume; different parts give
    independent ones. 31 bits fit every sampler's seed type.
    """
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 33
