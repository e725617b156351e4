"""Settings for all tests."""

from hypothesis import settings

# A busy machine is slow; a law holds at any speed.
settings.register_profile("kvwatch", deadline=None)
settings.load_profile("kvwatch")
