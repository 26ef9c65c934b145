"""Places steps on devices, and joins processes into one job.

Device names, and the process settings of a launcher, enter. Strategies leave, whose layout the
compiled steps use, and `Processes`, the place of this process in its job. This room may import
`_data` and the rooms below it.
"""
