import csv


def read_csv(path):
    """The rows of a CSV file by the names in its head."""
    with path.open() as file:
        return list(csv.DictReader(file))
