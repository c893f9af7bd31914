"""Small files of examples, and a config whose clients bring them."""

from fedmtl.config.file import load_config


def write(path, rows, header="text\tlabel"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *("\t".join(row) for row in rows)]) + "\n")
    return path


ROWS = [("alpha one", "x"), ("bravo two", "y"), ("charlie three", "x"), ("delta four", "y")]


def config_of(tmp_path, **sources):
    clients = {name: {"tasks": ["mood"], "source": {"mood": str(path)}} for name, path in sources.items()}
    task = {"kind": "classification", "text": ["text"], "label": "label"}
    return load_config({"tasks": {"mood": task}, "clients": clients, "data": {"validation_fraction": 0.5}})
