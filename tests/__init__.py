"""The tests: they mirror `src/headwater/`, and what several of them share is in `rigs/`."""
