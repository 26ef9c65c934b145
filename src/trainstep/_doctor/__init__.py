"""doctor: a script, or the block of a `with`, enters.

A `Report` on its traces and compilations leaves, with causes, costs and cures, as text, JSON or
HTML. This room may import `_surroundings`, `_explain` and `_common` alone, and neither
Keras nor an engine.

    script --hooks--> records --diagnosis--> report --show--> text, JSON, HTML
"""

from trainstep._doctor.session import Doctor as Doctor
from trainstep._doctor.session import doctor as doctor
