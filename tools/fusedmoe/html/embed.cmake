# Makes page_template.cpp: page.html with its style, its scripts and d3 inside, as one string, so
# that the command needs no file when it runs. Without d3 the string is empty and --html says so.
function(fusedmoe_embed_page output)
  find_file(FUSEDMOE_D3 d3.min.js PATHS /usr/share/javascript/d3 /usr/share/nodejs/d3
    DOC "d3 3.5 for the plots of bench --html (Debian: libjs-d3)")
  set(here ${CMAKE_CURRENT_FUNCTION_LIST_DIR})
  set(page "")
  if(FUSEDMOE_D3)
    file(READ ${here}/page.html page)
    file(READ ${here}/page.css css)
    file(READ ${here}/plots.js plots)
    file(READ ${here}/page.js script)
    file(READ ${FUSEDMOE_D3} d3)
    string(REPLACE "@FUSEDMOE_CSS@" "${css}" page "${page}")
    string(REPLACE "@FUSEDMOE_JS@" "${plots}\n${script}" page "${page}")
    string(REPLACE "@FUSEDMOE_D3@" "${d3}" page "${page}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
      ${here}/page.html ${here}/page.css ${here}/plots.js ${here}/page.js ${FUSEDMOE_D3})
  else()
    message(STATUS "libjs-d3 not found: `fusedmoe bench --html` will refuse")
  endif()
  # Made anew only when it differs: a new time would compile it at every configure.
  file(CONFIGURE OUTPUT ${output} @ONLY CONTENT
"// Generated from tools/fusedmoe/html/.
namespace fusedmoe::tool {
extern const char kPageTemplate[];
const char kPageTemplate[] = R\"fusedmoe_page(@page@)fusedmoe_page\";
}  // namespace fusedmoe::tool
")
endfunction()
