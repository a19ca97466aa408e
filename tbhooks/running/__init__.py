"""`tbhooks run`: an unchanged training script, watched.

`command` understands the options, `launching` runs the script as `python` would, `session` looks on while it runs:
`finding` and `covering` find the models, `destinations` where their runs go, `patches` holds what is patched meanwhile,
`terminal` and `telling` are all that is said. Nothing here loads torch before the script does.
"""
