// Package headrace calls Headrace servers: text generation over gRPC, one request at a time or many on one stream.
//
// A [Client] has a connection to one server, or chooses among several. It generates whole results ([Client.Generate]),
// streams one request's output ([Client.Stream]), runs many requests on one stream ([Client.Session]) or a bounded
// number of them at a time ([Client.Batch]), and calls tools ([Client.RunTools]).
//
//	client, err := headrace.NewClient("localhost:50051")
//	if err != nil {
//		return err
//	}
//	defer client.Close()
//	result, err := client.Generate(ctx, &headrace.Request{Text: "Once upon a time", MaxTokens: headrace.Ptr(32)})
//
// Errors are [*Error] values, which have the server's code, reason, refused fields and advice when to come again. The
// package tries again what may be tried again without harm; see [WithRetries] and [SessionOptions].
//
// All methods of all types may be called from several goroutines, unless they say otherwise.
package headrace
