"""The composition root: what an application declares, how it is launched, and how it runs."""
