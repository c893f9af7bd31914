"""The guide's commands: one server and one client per site, on this machine unless told otherwise.

python federated_main.py --mode server --config federated_config.yaml
python federated_main.py --mode client --client_id sst2_client --tasks sst2
"""

from fedmtl.cli.guide_main import main

if __name__ == "__main__":
    main()
