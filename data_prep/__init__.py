"""Commands that prepare data, score sentences and encode sets."""

from medclip_dcl.common.processes import let_threads_of_a_command_sleep

let_threads_of_a_command_sleep()
