"""GRPO in plain torch, on a verifiable reward: the demo's trainer."""
