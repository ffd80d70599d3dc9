"""What a container must be given to reach its devices, and the files of the host that this is made of.

Device list strategies become container edits. The driver's files and the kernel's data become CDI specifications.
"""
