#pragma once
// What makes the texts of errors, and the one kind of pointer that is used.
#if __has_include(<bits/unique_ptr.h>)
#include <bits/unique_ptr.h>
#else
#include <memory>
#endif
#include <stdexcept>
#include <string>
namespace poptorch {
class Text {
  std::string text_;
 public:
  Text& operator<<(const std::string& text) { text_ += text; return *this; }
  Text& operator<<(int64_t number) { text_ += std::to_string(number); return *this; }
  std::string str() const { return text_; }
};
}  // namespace poptorch
