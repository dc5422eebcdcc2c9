"""Adapters that put seqzoo's mixers into other frameworks; one subpackage a framework."""
