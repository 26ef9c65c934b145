"""doctor: what a script traced and compiled, why, what it cost, and what to change.

    script --hooks--> records --diagnosis--> report --> text, JSON, HTML

A hook waits for a library to be imported, and never imports one itself.
"""

from trainstep._doctor.session import Doctor as Doctor
from trainstep._doctor.session import doctor as doctor
