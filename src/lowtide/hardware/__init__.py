"""What this machine has, and what it is measured to do.

`memory` asks the system for sizes; `machine` names the machine and measures its rates; `measure`
measures what one expert costs; `store` keeps that until the machine or the model changes.
"""
