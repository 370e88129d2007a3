# What find_package(headrace) reads: the targets headrace::contract and headrace::session.
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(Protobuf)
find_dependency(gRPC CONFIG)
include(${CMAKE_CURRENT_LIST_DIR}/headraceTargets.cmake)
