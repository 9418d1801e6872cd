"""Instruments that read a run folder: what reuse costs, what the gate does, and the report page."""
