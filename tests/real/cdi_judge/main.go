// Judges CDI specifications as container runtimes do: a line for each file named, with the verdict of the CDI library's
// reader and that of its JSON Schema, as JSON: {"file": ..., "library": ..., "schema": ...}, each empty where it is valid.
package main

import (
	"encoding/json"
	"fmt"
	"os"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/schema/schema"
)

type verdict struct {
	File    string `json:"file"`
	Library string `json:"library"`
	Schema  string `json:"schema"`
}

func reason(err error) string {
	if err == nil {
		return ""
	}
	if text := err.Error(); text != "" {
		return text
	}
	return "invalid"
}

// judged is what a judgement says, also where it panics, as the library does over null among the device nodes.
func judged(judgement func() error) (said string) {
	defer func() {
		if failure := recover(); failure != nil {
			said = fmt.Sprintf("panic: %v", failure)
		}
	}()
	return reason(judgement())
}

func main() {
	judge := schema.BuiltinSchema()
	out := json.NewEncoder(os.Stdout)
	for _, file := range os.Args[1:] {
		said := verdict{
			File:    file,
			Library: judged(func() error { _, err := cdi.ReadSpec(file, 0); return err }),
			Schema:  judged(func() error { return judge.ValidateFile(file) }),
		}
		if err := out.Encode(said); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
}
