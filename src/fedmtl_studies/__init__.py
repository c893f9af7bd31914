"""Five studies with fedmtl: grids of runs, and the tables, figures and pages that compare them.

This package uses the library as any other package could; everything that it takes from there is named in `library` and
`computing`. The command line finds it by the entry point `study` of the group `fedmtl.commands`.
"""
