"""Grammars that bind an answer: made from what a request asks for, checked in a process of their own, compiled."""
