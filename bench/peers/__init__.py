"""Peers: what Headwater is measured beside; the servers themselves are those of `headwater.testing.servers`."""
