# Compile options for every target of the project, attached by fusedmoe_options(<target>).
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_C_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

function(fusedmoe_options target)
  target_compile_options(${target} PRIVATE
    -Wall -Wextra -Wconversion -Wno-sign-conversion
    # No contraction: a multiply and an add round twice everywhere, so that scalar tails and
    # vector bodies, and one compiler and another, agree on every bit.
    -ffp-contract=off
    # g++ 12 sees overlaps in std::string that are not there (GCC bug 105651).
    $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
  if(FUSEDMOE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(FUSEDMOE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${FUSEDMOE_SANITIZE}
      -fno-sanitize-recover=all -fno-omit-frame-pointer -g)
    target_link_options(${target} PUBLIC -fsanitize=${FUSEDMOE_SANITIZE})
  endif()
endfunction()
