"""Many methods with several seeds on one dataset, in one table.

`plan` says which runs there are, `running` trains what is missing, `table` compares what is finished, `page` draws it.
"""
