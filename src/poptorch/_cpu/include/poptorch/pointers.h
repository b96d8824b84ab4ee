#pragma once
// The one kind of pointer that is used, without the others of <memory>.
#if __has_include(<bits/unique_ptr.h>)
#include <bits/unique_ptr.h>
#else
#include <memory>
#endif
