"""`python deploy/dashboards` writes the dashboards."""

from boards import main

main()
