"""Commands that prepare data: each stage is `python -m data_prep.NAME`."""

from medclip_dcl.common.processes import let_threads_of_a_command_sleep

let_threads_of_a_command_sleep()
