"""The demonstration: shops in processes of their own write orders to one log, one of them is killed, and the count is right."""
