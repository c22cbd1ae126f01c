"""The backends that run the case table on this machine."""

BACKENDS = ("reference",)
