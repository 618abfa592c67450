"""What a store of a log must offer, and the rules that all of them keep."""
