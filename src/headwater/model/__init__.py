"""The nouns that cross every border; imports nothing else of Headwater."""
