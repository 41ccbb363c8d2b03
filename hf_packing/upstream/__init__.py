"""The doors to other libraries: what is private in them, or differs between the versions that we support.

Nothing else in the package uses a name with an underscore of these libraries, or asks for a version. Each door has a
test that says what broke when a new version changes it; `make doors` runs these tests.
"""
