"""Saved searches: which of them match a document, found in the time that the document's words take."""
