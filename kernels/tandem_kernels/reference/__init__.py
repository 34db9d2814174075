"""The meaning of every operation in plain torch. The CPU engine runs on these functions."""
