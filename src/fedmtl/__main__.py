from fedmtl.cli import main

main()
