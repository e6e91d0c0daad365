"""From a folder of images of persons to a private model that may be published, in six commands."""
