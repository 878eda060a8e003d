# What the shared library exports, and what `cmake --install` puts where: library, headers, CMake
# package, pkg-config file and the command. The tree can be moved after the install.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# libstdc++ marks its own templates as visible, so that instantiations would leak in spite of
# -fvisibility=hidden: a version script keeps what is ours.
get_target_property(fusedmoe_type fusedmoe TYPE)
if(fusedmoe_type STREQUAL "SHARED_LIBRARY")
  target_link_options(fusedmoe PRIVATE
    "LINKER:--version-script=${PROJECT_SOURCE_DIR}/cmake/exports.map")
  set_property(TARGET fusedmoe APPEND PROPERTY
    LINK_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/exports.map")
endif()

option(FUSEDMOE_INSTALL "Make install rules" ${PROJECT_IS_TOP_LEVEL})
if(NOT FUSEDMOE_INSTALL)
  return()
endif()

install(TARGETS fusedmoe EXPORT fusedmoe-targets
  RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR}
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/fusedmoe
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/include/fusedmoe/version.h
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/fusedmoe)
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE
  DESTINATION ${CMAKE_INSTALL_DATADIR}/licenses/fusedmoe)
if(TARGET fusedmoe_command)
  install(TARGETS fusedmoe_command RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# find_package(fusedmoe 0.1 CONFIG) -> fusedmoe::fusedmoe
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/fusedmoe)
install(EXPORT fusedmoe-targets NAMESPACE fusedmoe:: DESTINATION ${package_dir})
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/fusedmoe-config.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/fusedmoe-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/fusedmoe-config-version.cmake
  COMPATIBILITY SameMajorVersion)
install(FILES
  ${PROJECT_BINARY_DIR}/cmake/fusedmoe-config.cmake
  ${PROJECT_BINARY_DIR}/cmake/fusedmoe-config-version.cmake
  DESTINATION ${package_dir})

# pkg-config: paths relative to the file itself, but for directories that are absolute.
if(IS_ABSOLUTE "${CMAKE_INSTALL_LIBDIR}")
  set(pc_prefix ${CMAKE_INSTALL_PREFIX})
  set(pc_libdir ${CMAKE_INSTALL_LIBDIR})
else()
  file(RELATIVE_PATH pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
  string(REGEX REPLACE "/$" "" pc_to_prefix "${pc_to_prefix}")
  set(pc_prefix "\${pcfiledir}/${pc_to_prefix}")
  set(pc_libdir "\${prefix}/${CMAKE_INSTALL_LIBDIR}")
endif()
if(IS_ABSOLUTE "${CMAKE_INSTALL_INCLUDEDIR}")
  set(pc_includedir ${CMAKE_INSTALL_INCLUDEDIR})
else()
  set(pc_includedir "\${prefix}/${CMAKE_INSTALL_INCLUDEDIR}")
endif()
# What a static libfusedmoe needs besides itself, also when a C compiler links it.
set(pc_private "")
foreach(library IN LISTS CMAKE_CXX_IMPLICIT_LINK_LIBRARIES)
  if(library MATCHES "^(stdc\\+\\+|c\\+\\+|c\\+\\+abi|m)$")
    string(APPEND pc_private " -l${library}")
  endif()
endforeach()
string(APPEND pc_private " -pthread")
foreach(library IN LISTS CMAKE_DL_LIBS)
  string(APPEND pc_private " -l${library}")
endforeach()
string(STRIP "${pc_private}" pc_private)
# With no shared library, plain `pkg-config --libs` has to give the whole list.
set(pc_static "")
if(fusedmoe_type STREQUAL "STATIC_LIBRARY")
  set(pc_static " ${pc_private}")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/fusedmoe.pc.in
  ${PROJECT_BINARY_DIR}/cmake/fusedmoe.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/cmake/fusedmoe.pc
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
