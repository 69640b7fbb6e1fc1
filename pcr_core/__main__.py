"""``python -m pcr_core``: the command ``pcr``, where it is not on the path."""

from pcr_core.command import main

main()
