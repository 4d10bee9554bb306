"""The machine's resources and measured speeds.

`memory` asks the system for sizes. `machine` names the machine and measures its rates. `measure`
times one expert. `store` keeps the results until the machine or the model changes.
"""
